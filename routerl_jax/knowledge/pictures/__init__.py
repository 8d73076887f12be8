"""Knowledge bases of pictures: captions and pictures found by CLIP score fusion, and reverse image search."""
