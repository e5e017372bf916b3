"""Reading and writing checkpoints, in this project's format and in those of other systems."""
