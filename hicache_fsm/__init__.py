"""The life of a request between a storage tier of KV cache and the device, as explicit state machines."""

__version__ = "0.1.0"
