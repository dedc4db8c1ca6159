"""With which arguments is each rule proved?"""

from .every import samples

__all__ = ["samples"]
