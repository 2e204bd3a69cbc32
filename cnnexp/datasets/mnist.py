"""`mnist`: 70,000 handwritten digits (LeCun, Cortes, Burges), 28x28, gray."""

from cnnexp.datasets.idx import IdxSet


class Mnist(IdxSet):
    """60,000 training and 10,000 test images; fields as `IdxSet`.

    Files are held against the sha256 of their decompressed content, which every gzip wrapper of them shares.
    """

    name = "mnist"
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    sha256 = (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    )
    classes = tuple("0123456789")
