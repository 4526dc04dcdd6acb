"""stub"""
from dataclasses import dataclass
PUBLISHED_GEOMETRY=None
def generate(*a,**k): ...
