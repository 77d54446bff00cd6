"""What is looked at: models and optimizers (`state`, `modules`), contents (`fingerprint`), and where the process stands (`mesh`, `structure`)."""
