"""minigpt: a small GPT to train, sample and look into.

Importing the package loads neither torch nor any other heavy library; take what you need from its modules.
"""

__version__ = "0.1.0"
