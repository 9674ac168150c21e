"""The data sets, a small file each, behind one door (base.py)."""
