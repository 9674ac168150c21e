"""The kinds of data sets, a small file each; each is found by its `type` in the group `onbeat.dataset_types`."""
