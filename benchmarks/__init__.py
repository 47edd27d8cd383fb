"""What the library costs, measured."""
