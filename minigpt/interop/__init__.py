"""In and out of the formats that others use; only files are read and written, no library of theirs is needed."""
