"""Draws rehearsals as one page of HTML."""
