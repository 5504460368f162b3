"""Tests of the trainer and of its command."""
