"""p2ptrain in the training loops of other libraries. Each module needs the extra of the same name."""
