"""Put on a worker's path by ``everstep run``, so that scripts that never import everstep are watched.

Takes itself off the path again, lets another sitecustomize run, and waits for torch: when the
optimizers are there, every ``optimizer.step()`` is seen. Nothing in the script changes.
"""

import os
import sys

# Read when a library is loaded: a process that has loaded torch already cannot honour a later change.
_READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "LD_", "TORCH", "PYTORCH_", "ATEN_")


def _at_import():
    """What torch would see if it were loaded now."""
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
    """Stands first among the finders until the optimizers are imported."""

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
            from everstep import zero
        except ImportError:
            return  # this interpreter has no everstep: the script runs unwatched, as under torchrun
        zero.install(warm_safe=not self.moved, changed=self.changed)


if "EVERSTEP_PRELOAD" in os.environ:
    _leave_path()
    # Another sitecustomize, the one that would have been found without us.
    _own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        sys.modules["sitecustomize"] = _own
    if "EVERSTEP_BOARD" in os.environ:
        sys.meta_path.insert(0, _WhenTorchComes())
