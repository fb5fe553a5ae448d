"""Tools that agents call: the models' formats of calls, a calculator, and Python in a sandbox."""
