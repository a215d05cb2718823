"""Weights from files straight into masters, and back."""
