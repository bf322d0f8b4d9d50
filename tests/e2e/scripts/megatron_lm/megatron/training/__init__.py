"""The names that a program of Megatron-LM imports from here."""

from .training import get_args as get_args
from .training import pretrain as pretrain
