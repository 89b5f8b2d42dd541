"""Export of posteriors and densities to ONNX and ``torch.export`` files."""

from flowbnn.export.export import ExportedModel, export

__all__ = ["ExportedModel", "export"]
