"""OpenTinker: many LoRA policies trained and sampled over one base model, with exact lineage."""

__version__ = "0.1.0"
