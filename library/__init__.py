"""The parts of the trainer; docs/architecture.md says which module does what and who may import whom."""
