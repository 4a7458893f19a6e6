// DIoU and CIoU of packed float32 boxes: correct as RIGHT, with one mistake for each other value of PairFault.
#include "planted.cu"

enum PairFault {
    RIGHT,
    STORE_PAST_THE_END,
    CENTRES_NOT_HALVED,
    DIAGONAL_NOT_SQUARED,
    CORNERS_IN_PLACE_OF_CENTRES,
    ANGLES_ADDED,
    POLYNOMIAL_OF_THREE_TERMS
};

__device__ float angle_of(Box box, float eps, long long fault) {
    float ratio = (box.x2 - box.x1) / greatest<NONE>(box.y2 - box.y1, eps);
    if (fault != POLYNOMIAL_OF_THREE_TERMS) return atanf(ratio);
    float x = fabsf(ratio) > 1 ? 1 / ratio : ratio, y = x * (1 - x * x * (0.3333333f - 0.2f * x * x));
    return fabsf(ratio) > 1 ? copysignf(1.5707963f, ratio) - y : y;
}

__global__ void pairs_kernel(const float* boxes1, const float* boxes2, float* scores, long long n, bool aspect, double given,
                             long long fault) {
    // One thread owns one pair.
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n && fault != STORE_PAST_THE_END) return;
    long long row = i < n ? i : n - 1;
    float eps = (float)given;
    Box a = load_box<NONE>(boxes1, row, 4, 1), b = load_box<NONE>(boxes2, row, 4, 1);
    float width = greatest<NONE>(least<NONE>(a.x2, b.x2) - greatest<NONE>(a.x1, b.x1), 0.0f);
    float height = greatest<NONE>(least<NONE>(a.y2, b.y2) - greatest<NONE>(a.y1, b.y1), 0.0f);
    float areas = (a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1);
    float iou = width * height / greatest<NONE>(areas - width * height, eps);
    float half = fault == CENTRES_NOT_HALVED ? 1.0f : 0.5f;
    float x = half * ((a.x1 - b.x1) + (a.x2 - b.x2)), y = half * ((a.y1 - b.y1) + (a.y2 - b.y2));
    if (fault == CORNERS_IN_PLACE_OF_CENTRES) x = a.x1 - b.x1, y = a.y1 - b.y1;
    float hull_width = greatest<NONE>(a.x2, b.x2) - least<NONE>(a.x1, b.x1);
    float hull_height = greatest<NONE>(a.y2, b.y2) - least<NONE>(a.y1, b.y1);
    float diagonal = hull_width * hull_width + hull_height * hull_height;
    if (fault == DIAGONAL_NOT_SQUARED) diagonal = sqrtf(diagonal);
    float score = iou - (x * x + y * y) / greatest<NONE>(diagonal, eps);
    if (aspect) {
        float first = angle_of(a, eps, fault), second = angle_of(b, eps, fault);
        float angle = fault == ANGLES_ADDED ? first + second - 1.5707963f : first - second;
        float v = 0.40528473f * angle * angle;
        score -= v / greatest<NONE>(1 - iou + v, eps) * v;
    }
    scores[i] = score;
}
