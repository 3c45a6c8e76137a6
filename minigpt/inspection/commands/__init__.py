"""The parts of ``scripts/compare_attention.py``, each with ``add_arguments(parser)`` and ``run(options)``."""
