"""Tests of the synthetic world."""
