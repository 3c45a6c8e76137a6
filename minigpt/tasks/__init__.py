"""Text whose links are known: the embedded corpus and tasks with a fixed answer."""
