"""Tokenizers under one small interface."""
