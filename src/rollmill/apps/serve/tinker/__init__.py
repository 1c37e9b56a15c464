"""The HTTP interface of the tinker SDK: clients train LoRA adapters over one base model, and sample from them."""
