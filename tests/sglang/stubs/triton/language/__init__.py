from .. import Anything


class constexpr:
    def __init__(self, value=None):
        self.value = value

    def __class_getitem__(cls, item):
        return cls


class dtype:
    pass


class tensor:
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
