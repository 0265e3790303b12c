"""`python -m common.prepare.NAME` writes a data set in verl's format, or a model."""
