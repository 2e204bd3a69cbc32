"""`fashion_mnist`: 70,000 pictures of clothes (Xiao, Rasul, Vollgraf 2017), 28x28, gray, in MNIST's form."""

from cnnexp.datasets.idx import IdxSet


class FashionMnist(IdxSet):
    """60,000 training and 10,000 test images; fields as `IdxSet`.

    Its page gives the md5 of the gzipped files; the sha256 here are those that projects which pin both agree on. Of
    decompressed files only the form and the counts can be checked.
    """

    name = "fashion_mnist"
    mirrors = ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",)
    sha256 = (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    )
    gzipped = True
    classes = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
