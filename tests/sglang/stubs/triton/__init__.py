"""Stands in for triton: kernels may be defined, none may be launched. SGLang imports triton nearly everywhere, also on a CPU."""

import importlib.abc
import importlib.machinery
import sys

__version__ = "3.7.0"


class Anything:
    """Whatever is asked of it: an attribute, a call (a decorator gives its function back), an item; empty as a collection."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getitem__(self, index):
        return Anything()

    def __iter__(self):
        return iter(())

    def __contains__(self, item):
        return False

    def __len__(self):
        return 0

    def __bool__(self):
        return False


class Kernel:
    """A defined kernel."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__module__ = getattr(function, "__module__", __name__)
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"kernel {self.__name__} launched, which the stand-in for triton cannot do")


def jit(function=None, **options):
    return Kernel(function) if function is not None else Kernel


def autotune(*args, **kwargs):
    return lambda function: function


heuristics = autotune


class Config:
    def __init__(self, kwargs=None, **options):
        self.kwargs = kwargs or {}


def cdiv(one, other):
    return -(-one // other)


def next_power_of_2(number):
    return 1 << max(int(number) - 1, 0).bit_length()


def _named(name):
    """Something of that name: names of classes may be caught as exceptions or subclassed."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[:1].isupper():
        return type(name, (Exception,), {"__init__": lambda self, *args, **kwargs: None})
    return Anything()


def __getattr__(name):
    return _named(name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any ``triton.x.y`` that is not a file here."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = _named


sys.meta_path.append(Submodules())

import triton.runtime  # noqa: E402, F401 - by name: who asks for its driver finds it here without importing it
