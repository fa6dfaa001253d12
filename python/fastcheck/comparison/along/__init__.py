"""Along time: which steps are compared with which, and how the losses drift apart."""
