"""Analysis: what a model costs, and pictures of how runs went."""
