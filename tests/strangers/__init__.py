"""Scripts of strangers: each runs with holdfast off, with holdfast on, and interrupted, and must not be harmed.

``rows`` says what a row of the battery is, ``idioms/`` are scripts that we wrote the way others write them,
``idiom_rows`` lists them. ``launch`` starts a script, ``injected/``
interrupts it at a chosen step, ``compare`` looks at what it left, ``trial`` puts the three together, ``report`` writes
tables.
``python -m tests.strangers`` runs rows by their names.
"""
