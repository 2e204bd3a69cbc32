"""The papers' published numbers, and the pages that set ours beside them."""
