"""What all verbs share: arguments that mean the same everywhere, what to try, what a shell completes."""
