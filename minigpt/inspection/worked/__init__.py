"""The worked examples: read, computed by every implementation, shown step by step."""
