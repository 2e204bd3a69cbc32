"""Command lines that several tests run."""

TINY = ("experiment=smoke", "backend=numpy", "tracking=none", "trainer.baseline=null", "trainer.epochs=1")
