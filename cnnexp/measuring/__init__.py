"""Where time goes and what bounds it: the time ledger, the roofline, the cost model of several workers."""
