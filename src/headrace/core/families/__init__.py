"""Model families as data: one file each, found by looking through this package.

A family says which configurations it reads, how they become a ``ModelSpec``, and which stored name
holds which weight. Adding one is adding one file here (CONTRIBUTING.md has the recipe).
"""

from headrace.core.families.base import Family, families, family_of, family_of_gguf

__all__ = ["Family", "families", "family_of", "family_of_gguf"]
