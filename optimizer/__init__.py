"""The sharded optimizers of ckpttools. None is in this release."""
