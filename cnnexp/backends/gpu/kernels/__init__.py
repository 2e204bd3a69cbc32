"""The kernels that layers run one by one: what is the same for all of them is in `index`."""
