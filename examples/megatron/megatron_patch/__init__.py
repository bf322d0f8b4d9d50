"""A folder of the name that Pai-Megatron-Patch's has; its modules are found beside ours."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
