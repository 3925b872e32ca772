"""Sources of text, one file each."""
