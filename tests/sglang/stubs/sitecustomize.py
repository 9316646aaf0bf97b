"""Put this folder on PYTHONPATH: a torch without CUDA does not load torchvision's library, whose Python half then misses two operators."""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept = []


class DeclareBeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first imported, then steps aside."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _kept.append(library)
            for schema in SCHEMAS:
                if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
                    library.define(schema)


sys.meta_path.insert(0, DeclareBeforeTorchvision())
