"""Bytes: local files, torch.save files and what their pickles say."""
