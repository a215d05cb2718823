"""An example trainer of LoRAs: `oracle-offload train-lora`; docs/train-lora.md."""
