"""Pure decisions: tables of what is seen and what follows from it. No I/O, no clock, no randomness."""
