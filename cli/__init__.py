"""The ``ckpttools`` command. It calls :mod:`ckpttools.api`, and holds no logic of its own."""
