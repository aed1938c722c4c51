"""Generative models: whole answers, token by token, under one seam between engines and doors."""
