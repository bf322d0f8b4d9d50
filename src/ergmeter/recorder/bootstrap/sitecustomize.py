# ruff: noqa: ANN001, ANN201, ANN202, ANN204, BLE001, PLC0415, PTH100, PTH112, PTH118, PTH120, PTH123, SIM105, UP004, UP031
# mypy: ignore-errors
"""The hook of `erg record`: each Python of a recorded command runs this file when it starts.

It hooks the import of training libraries, writes a report into the run directory, removes itself
from the path, and runs the user's own sitecustomize, which it shadows. It prints nothing, imports
nothing heavy, and fails silently, so as not to disturb the program. Old Pythons may run it too, so
it uses only what all of them have.
"""

import os
import sys

NAMES = (
    "torch", "safetensors.torch", "torch.distributed.checkpoint", "transformers.modeling_utils",
    "accelerate.accelerator", "lightning.fabric.fabric", "lightning_fabric.fabric", "deepspeed",
    "transformers.trainer", "lightning.pytorch.trainer.trainer", "wandb", "mlflow",
    "pytorch_lightning.trainer.trainer", "torch.utils.tensorboard.writer",
)  # fmt: skip


class _Then(object):
    """A loader that attaches the hook to its module after executing it."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        spec = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            import importlib

            importlib.import_module("ergmeter.integrations.record_hook").attach(spec.name, module)
        except Exception as error:  # in the user's program, which goes on
            _say((("attached", "%s: %s: %s" % (spec.name, type(error).__name__, error)),))


class _Waiting(object):
    """A finder that makes the libraries in _NAMES load through _Then."""

    def find_spec(self, name, path=None, target=None):
        if name not in NAMES:
            return None
        spec = next(_specs(name, path, target, skipped=self), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Then(spec.loader)
        return spec


def _specs(name, path=None, target=None, skipped=None):
    """Yield the module specs that the other finders have for a name, in their order."""
    for finder in sys.meta_path:
        if finder is not skipped and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                yield spec


def _say(report):
    """Append to this process's report in the run directory. Errors are ignored."""
    path = os.path.join(os.environ.get("ERGMETER_RUN", ""), ".hook", str(os.getpid()))
    try:
        with open(path, "a") as file:
            lines = ("%s\t%s\n" % (name, " ".join(word.split())) for name, word in report)
            file.write("".join(lines))
    except Exception:  # in the user's program, which goes on
        pass


def _begin():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    run = os.environ.get("ERGMETER_RUN")
    if not run or not os.path.isdir(os.path.join(run, ".hook")):
        return  # or the recorder has ended, and this came after it
    if os.environ.get("ERGMETER_FLUSH_LINES") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    is_there = sys.version_info >= (3, 10) and any(True for _ in _specs("ergmeter"))
    report = (
        ("executable", sys.executable),
        ("version", "%d.%d.%d" % sys.version_info[:3]),
        ("ergmeter", "yes" if is_there else "no"),
    )
    _say(report)
    if is_there:
        watch_imports()


def watch_imports():
    """From now on each library of NAMES is attached to when it is imported; asked once."""
    if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _other():
    """The sitecustomize that Python would have run without us."""
    return next((spec for spec in _specs("sitecustomize") if spec.loader is not None), None)


if __name__ == "sitecustomize":  # else a notebook imports it, for `watch_imports`
    try:
        _begin()
    except Exception:  # in the user's program, which goes on
        pass
    try:
        _spec = _other()
    except Exception:  # a finder of the user's
        _spec = None
    if _spec is not None:
        import importlib.util

        _module = importlib.util.module_from_spec(_spec)
        sys.modules["sitecustomize"] = _module
        _spec.loader.exec_module(_module)
