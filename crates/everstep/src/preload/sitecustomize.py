"""``everstep run`` puts this on workers' path to watch scripts that never import everstep.

It takes itself off the path, lets another sitecustomize run, and waits for torch. Once the
optimizers are imported, every ``optimizer.step()`` is observed. Nothing in the script changes.
"""

import os
import sys

# Read when a library is loaded: once a process has loaded torch, later changes have no effect.
_READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "LD_", "TORCH", "PYTORCH_", "ATEN_")


def _at_import():
    """Returns the variables and processors that torch would see if it were loaded now."""
    names = [n for n in os.environ if n.startswith(_READ_AT_IMPORT) and not n.startswith("TORCHELASTIC_")]
    return {n: os.environ[n] for n in names}, os.sched_getaffinity(0)


def _leave_path():
    own = os.environ.pop("EVERSTEP_PRELOAD")
    users = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p != own]
    if users and any(users):
        os.environ["PYTHONPATH"] = ":".join(users)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [p for p in sys.path if p != own]
    sys.path_importer_cache.pop(own, None)


class _WhenTorchComes:
    """The first of the finders, until the optimizers are imported."""

    def __init__(self):
        self.before, self.processors = _at_import()
        self.changed = {}
        self.moved = False

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            now, processors = _at_import()
            self.changed = {n: now.get(n) for n in now.keys() | self.before.keys() if now.get(n) != self.before.get(n)}
            self.moved = processors != self.processors
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.arrived()

        spec.loader.exec_module = exec_module
        return spec

    def arrived(self):
        try:
            from everstep import zero_line
        except ImportError:
            return  # no everstep in this interpreter: the script runs unwatched, as under torchrun
        zero_line.install(warm_safe=not self.moved, changed=self.changed)


if "EVERSTEP_PRELOAD" in os.environ:
    _leave_path()
    # Another sitecustomize: the one that would have been found without this file.
    _own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        sys.modules["sitecustomize"] = _own
    if "EVERSTEP_BOARD" in os.environ:
        sys.meta_path.insert(0, _WhenTorchComes())
