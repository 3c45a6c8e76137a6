"""minigpt: a small GPT to train, sample and look into.

    import minigpt
    run = minigpt.load("runs/bard")
    run.generate("ROMEO:", max_new_tokens=50)

Importing the package loads neither torch nor any other heavy library; ``load`` is all that it names, take the rest
from its modules.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minigpt.trained import load as load
else:

    def __getattr__(name: str) -> Any:
        if name != "load":
            raise AttributeError(f"module 'minigpt' has no attribute {name!r}")
        from minigpt.trained import load

        return load
