"""Torch-free configuration: settings of the installation, configs of training runs."""
