"""One page that shows a model at work, step by step, in any browser: exported as a file, or served on this machine."""
