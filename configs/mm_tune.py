from configs import mmsearch_r1_small
def get_config():
    c = mmsearch_r1_small.get_config(); c.unlock(); c.controls = type(c.controls)(); return c
